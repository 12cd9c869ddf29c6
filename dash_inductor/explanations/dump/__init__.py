"""Writes the pages of ``config.dump``: for every compiled graph a folder with its page, and a page that lists them all.

    <folder>/index.html                         the runs
    <folder>/<run>/index.html                   the graphs of one process
    <folder>/<run>/<compile id>/index.html      one graph: its sites, candidates, kernels, and these files:
        joint_before.py, joint_after.py         the joint graph around our pass, as readable Python
        joint.diff                              what the pass changed
        sites.json                              what `dash_inductor.explain` would say of the sites
        site_<n>_before.dot, _after.dot         the neighbourhood of a site
        site_<n>_schedule.txt, .json            the schedule that was chosen, worker by worker: text, and a trace
        forward.py, backward.py                 Inductor's generated code
        kernels/site_<n>/                       source, Triton's intermediate code and PTX of compiled kernels

Every process has a run of its own, named by its rank, its number and the time; files appear whole or not at all.
"""
