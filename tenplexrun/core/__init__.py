"""The pure core: no IO, no clock, no random source, no environment. Same input, same output."""
