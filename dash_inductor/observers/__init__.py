"""Events of a training run, for packages that observe training: `active` is the one table of who gets them.

observer    what an observer is told                    hooks      the global hooks through which PyTorch tells it
active      the observers of this process, and how compiled graphs show them tensors
names       names of modules and parameters             phases     names of the phases of a step
hook        a hook on a module that Dynamo leaves alone
"""
