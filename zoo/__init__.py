"""The zoo: training loops in plain PyTorch, each with one fault or healthy but odd, on which the doctor is scored."""
