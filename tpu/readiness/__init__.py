"""Whether a project is ready for runs: each condition by itself, with what is wrong and how to mend it."""
