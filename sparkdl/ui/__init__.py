"""How do people look at many runs at once, and at those that are going on?"""
