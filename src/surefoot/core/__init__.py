"""Types, errors and seeds shared by all rooms. No torch, no I/O."""
