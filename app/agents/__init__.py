"""Binade for agents: the Model Context Protocol over the same views as the app. No Streamlit here.

server   binade mcp: the protocol, on standard input and output
tools    what an agent can call, and their arguments
answers  views as text and pictures
"""
