"""Events of a training run, for packages that observe training: `active` lists the observers that get them.

observer    the base class of observers, with all events
hooks       the global hooks that send events of eager PyTorch
active      the observers of this process, and how compiled graphs pass tensors to them
names       names of modules and parameters
phases      names of the phases of a step
hook        a hook on a module that Dynamo does not trace
"""
