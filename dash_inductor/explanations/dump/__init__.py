"""Writes the pages of ``config.dump``: for every compiled graph a folder with its page, and pages that list them.

    <folder>/index.html                         the runs
    <folder>/<run>/index.html                   the graphs of one process
    <folder>/<run>/<compile id>/index.html      one graph: its sites, candidates, kernels, and these files:
        joint_before.py, joint_after.py         the joint graph before and after our pass, as readable Python
        joint.diff                              their difference
        sites.json                              the explanation of the sites, as `dash_inductor.explain` gives it
        site_<n>_before.dot, _after.dot         the neighbourhood of a site in the graph
        site_<n>_schedule.txt, .json            the chosen schedule, worker by worker: as text and as a trace
        forward.py, backward.py                 Inductor's generated code
        kernels/site_<n>/                       source, Triton GPU IR and PTX of compiled kernels

Every process has its own run, named by its rank, process id and the time; files are written atomically.
"""
