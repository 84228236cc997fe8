"""Methods of papers, a folder each; config/sections.py lists them."""
