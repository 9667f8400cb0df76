"""The actions of a stage, done in order."""
