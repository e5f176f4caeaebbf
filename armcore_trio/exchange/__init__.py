"""What the daemon exists for: jobs go out, acks and results come in, and what nobody answers is ended."""
