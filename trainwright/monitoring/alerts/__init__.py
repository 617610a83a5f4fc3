"""Messages about a run to somebody who does not look at it: rules, and where the messages go."""
