"""The work of each verb of the command line; ``cli/`` only parses arguments and prints.

init         a small project in a new folder, from templates/
convert      settings of another trainer as a recipe
check        would this recipe train? verdicts on data, model, loss, learning rate and first steps
plan         what a run would hold and take on a device, and the best layout
graph        the modules of a model and the autograd graph of one step
batch_size   the largest micro-batch that fits, by training
lr_range     the learning rate range test
mup_check    whether layers keep their size over the width of a model
ladder       from a float32 baseline to a fast run, one change at a time
verify       whether checkpoints are whole, and a resumed run has the same bits
replay       a recorded step again
export       the weights of a run for other programs
demo         a small run that ships with the package; demo_faults is ``demo --break``

Training itself is in ``training/``, environments and reports in ``report/``.
"""
