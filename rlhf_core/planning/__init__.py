"""What a configuration will need before anything starts: memory, time, and what to change if it does not fit.
No torch.
"""
