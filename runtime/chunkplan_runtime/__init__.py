"""The torch runtime: streams a plan and does its actions, with gradients equal to those of whole sequences."""
