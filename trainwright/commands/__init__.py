"""The work of the commands except ``train`` and ``resume``; ``cli/`` parses arguments and prints.

init         a small project in a new folder, from templates/
check        verdicts on data, model, loss, learning rate and first steps of a recipe
plan         predicted memory and time of a run on a device, and the best layout
graph        the modules of a model and the autograd graph of one step
lr_range     the learning rate range test
mup_check    output sizes of layers over the width of a model
ladder       from a float32 baseline to a fast run, one change at a time
verify       checks that checkpoints are intact and that a resumed run has the same bits
replay       replays a recorded step
export       the weights of a run for other programs
evaluate     loss, metrics and predictions on a dataset; bad_cases finds the worst predictions
sweep        trials of a recipe with varied settings; compare_optimizers varies the optimizer
profile      the bottleneck of a step, and remedies
launch       job files for schedulers
demo         a small run that ships with the package; demo_faults is ``demo --break``
python_api   the commands as functions: ``tw.check`` and others

Training itself is in ``training/``, environments and reports in ``report/``.
"""
