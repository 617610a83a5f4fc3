"""``verify``: proofs on the user's files, such as intact checkpoints and equal bits after a resume.

checkpoint  examines every file, hash, tensor and value of checkpoints
resume      trains a recipe straight, then with a kill and a resume, and compares the bits
trial       one training of ``resume`` in a separate process (``python -m trainwright.commands.verify.trial``)
plain       compares the first steps of a run with a loop written by hand
parallel    compares the first steps on several ranks with those of one process
packing     compares packed samples with the same samples alone
"""
