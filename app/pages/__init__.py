"""The pages of the inspector: one module for each name in `site.PAGES`, with `build(site)`."""
