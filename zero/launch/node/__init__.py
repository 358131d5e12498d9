"""What runs on each host: torch's agent, and the meeting with those of the other hosts."""
