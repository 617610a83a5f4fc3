"""``check RECIPE``: checks if a recipe would train. The trained weights are discarded.

check        runs all parts in order, each within its time budget
verdict      one verdict, and all verdicts of a recipe
samples      reads a part of a dataset
data         verdicts on the samples that were read
first_batch  one forward and backward pass of the untrained model
resources    memory before it is allocated; time to read data
learning     the learning rate range test; overfitting one batch
smoke        the first hundred steps of the run, watched by the doctor
sandbox      a job with a new state for each experiment
"""
