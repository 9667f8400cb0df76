"""Models of transformers as stages of a pipeline, and what is refused of them."""
