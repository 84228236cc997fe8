"""The pages of the inspector: a module for each name in `site.PAGES`, with `build(site)`."""
