// The engines of this process, for fork.
//
// A child has copies of the descriptors but none of the threads. It must not use the engine, nor hide the parent's end
// from its peers: so it closes every descriptor and refuses every call.

#pragma once

namespace unisono::engine {

class Engine;

void register_engine(Engine& engine);
void unregister_engine(Engine& engine);

}  // namespace unisono::engine
