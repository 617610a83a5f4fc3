"""Observers of steps that have ended. They read the results of training and change nothing."""
