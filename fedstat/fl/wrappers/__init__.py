"""What turns a network or a method into another: a mixture, fine-tuned or shrunken models."""
