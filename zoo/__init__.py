"""The zoo: training faults and healthy-but-odd runs, each a plain PyTorch loop that the doctor is judged on."""
