"""Predicts a run by arithmetic alone: no device is needed, and only ``trace`` imports torch.

make            the Plan of a run: every number derived from recipe and facts, with Notes that say why
batch, duration the batch equation; durations of a recipe as steps, seconds or fractions of the run
explain         the Plan as lines of text before the run
trace           traces one step under fake tensors: memory and operators
scale, roofline memory and time of any micro-batch from two traces
layout          the layout chosen for a device, with optimizer offload
many_ranks, parallel, splits, units, traffic  layouts on several ranks: memory, communication and time
checkpointing, memory  the activations that each block keeps; memory by arithmetic
profile         the autograd graph as data, with equal blocks folded into one
machine, devices  this machine; the table of GPUs
resume_changes  the changes that a resume would make, and how severe they are
"""
