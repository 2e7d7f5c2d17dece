"""Strategies whose replicas train apart for a round and then take their mean."""
