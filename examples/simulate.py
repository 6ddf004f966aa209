"""Simulate: 64 ranks in virtual time; then one of them is killed; the same seed replays the same run."""

import numpy as np

import unisono as uni
from unisono.simulation import Kill, Network


def program(world: uni.Communicator) -> float:
    x = np.full(256, world.rank, np.float32)
    for _ in range(20):
        world.all_reduce(x, op="mean")
    return float(x[0])


if __name__ == "__main__":
    slow = Network(latency_s=50e-6, bytes_per_s=1e9, jitter_s=5e-6)

    healthy = uni.simulate(program, 64, seed=7, network=slow)
    print(f"64 ranks agree on {healthy.results[0]:g} after {healthy.time_s * 1e3:.2f} virtual ms")

    broken = uni.simulate(program, 64, seed=7, network=slow, faults=[Kill(rank=3, at_s=0.002)])
    lost = [r for r in broken.results if isinstance(r, uni.PeerLost)]
    print(f"rank 3 was killed at 2 ms: {len(lost)} ranks raised PeerLost, naming {lost[0].ranks}")

    again = uni.simulate(program, 64, seed=7, network=slow, faults=[Kill(rank=3, at_s=0.002)])
    print(f"replayed: {again.trace_hash == broken.trace_hash} ({len(again.trace):,} events)")
