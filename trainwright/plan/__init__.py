"""What a run will do, by arithmetic alone: no torch at import, no device needed.

make            the Plan of a run: every number derived from recipe and facts, with Notes that say why
batch, duration the batch equation; durations of a recipe as steps, seconds or shares of the run
explain         the Plan as lines of text before the run
trace           what one traced step held and computed: the records that ``forecast`` makes
scale, roofline memory and time of any micro-batch from two traces
layout, remedies  which layout to choose for a device; what else would make a run fit
checkpointing, offload, memory  what activation checkpointing and optimizer offload keep and free
profile, fold   the autograd graph as data; equal blocks of it as one
machine, devices  this machine; the table of GPUs
resume_changes, resume_rules  what a resume would change, and how severe that is
"""
