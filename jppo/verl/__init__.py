"""Translation of verl command lines to jppo: names, values, shell scripts."""
