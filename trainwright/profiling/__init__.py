"""Where the time of a step goes: measured in the middle of a loop, judged by the roofline, and what helps, tried."""
