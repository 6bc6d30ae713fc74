"""Prompts: sources, chat templates, filtering, and a resumable stream."""
