"""``check RECIPE``: would this recipe train? Every verdict is a small function; what is trained here is thrown away.

check        runs all parts in order, each within its budget of time
verdict      one verdict, and all of a recipe
samples      reads a part of a dataset; data and alignment judge it
first_batch  one forward and backward pass of the untrained model
resources    memory before it is allocated; time to read data
learning     the range of learning rates; one batch learned by heart
smoke        the first hundred steps of the run, watched by the doctor
sandbox      a job with a new state for each experiment
"""
