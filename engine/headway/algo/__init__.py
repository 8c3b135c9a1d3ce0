"""What turns rewards and masks into the numbers of the loss: advantages, denominators, objectives by name."""
