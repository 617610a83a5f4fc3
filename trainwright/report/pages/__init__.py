"""Pages of runs: one file to send, a live page, runs side by side. All are made from run folders alone."""
