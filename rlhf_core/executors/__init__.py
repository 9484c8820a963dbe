"""Where a stage runs: in a child process, or as a Ray job, a RayJob on Kubernetes or a batch job of Slurm.

    spec.py       what a stage process is given
    child.py      starts the child process and follows it by its events (events.py)
    base.py       the interface of the three kinds of jobs
    choose.py     the scheduler of a stage
    job_files.py  the objects of a job in the store: its input, its events, its log, a request to stop
    follow.py     submits a job or finds one that is running, follows it, stops it
    ray_job.py, kuberay.py, slurm.py
    check.py      checks before the run

A job runs `python -m rlhf_core.executors.remote` on the cluster, which starts the child process there.
"""
