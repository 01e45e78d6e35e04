"""Serving simulated: traced texts under the real length policies, with rounds that cost what a table or a roofline says."""
