"""What is said and what it means, pure: no I/O, no clock."""
