"""The tuner of kernel plans: candidates, measured in turns, and the file of winners."""
