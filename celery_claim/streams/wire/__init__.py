"""What stands in Redis: the names of keys and the fields of a message."""
