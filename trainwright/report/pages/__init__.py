"""A run as something to look at: one file to send, a live page, runs side by side. All from run folders alone."""
