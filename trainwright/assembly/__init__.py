"""Plan to live objects: model, data, optimizer, schedule."""
