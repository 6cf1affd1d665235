"""What the tests share: one engine factory, faulty links, generated traffic, a stub engine."""
