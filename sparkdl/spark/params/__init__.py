"""The Params of estimators and models, and how these are saved."""
