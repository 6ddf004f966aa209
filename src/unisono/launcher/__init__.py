"""Starting and watching the processes of a job: `unisono run`, `uni.spawn`, mpiexec.

It imports bootstrap, and no backend or communicator.
"""
