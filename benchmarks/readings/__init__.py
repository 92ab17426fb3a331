"""What is read off programs and devices: machine code, profiles, peaks."""
