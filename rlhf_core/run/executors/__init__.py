"""Where a stage runs, if not in a child process: a Ray job, a RayJob on Kubernetes, a batch job of Slurm.

    base.py       the interface of the three
    choose.py     the scheduler of a stage
    job_files.py  the objects of a job in the store: its input, its events, its log, a request to stop
    follow.py     submits a job or finds one that is running, follows it, stops it
    ray_job.py, kuberay.py, slurm.py
    check.py      checks before the run

The job runs `python -m rlhf_core.run.remote` on the cluster, which runs the stage in a child process there.
"""
