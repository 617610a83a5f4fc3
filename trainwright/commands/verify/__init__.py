"""``verify``: proof on the user's own files that checkpoints are whole and a resumed run has the same bits.

checkpoint  examines every file, hash, tensor and value of checkpoints
resume      trains a recipe straight, and once more with a kill and a resume, and compares the bits
trial       one such training, in a process of its own (``python -m trainwright.commands.verify.trial``)
"""
