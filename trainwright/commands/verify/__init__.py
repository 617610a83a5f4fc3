"""``verify``: proves on the user's files that checkpoints are intact and that a resumed run has the same bits.

checkpoint  examines every file, hash, tensor and value of checkpoints
resume      trains a recipe straight, then with a kill and a resume, and compares the bits
trial       one such training in a separate process (``python -m trainwright.commands.verify.trial``)
"""
