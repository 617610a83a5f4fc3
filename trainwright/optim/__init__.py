"""Parameter groups, the optimizers of torch and of Trainwright, and optimizer offload."""
