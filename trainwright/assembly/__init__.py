"""From recipe and plan to live objects: model, data, optimizer, schedule."""
