"""The head of any model, found by watching it run; and the head's tensors read alone."""
