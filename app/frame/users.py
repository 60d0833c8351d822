"""The user of a page: their name, what they may do, and signing in."""

from __future__ import annotations

import streamlit as st

from binade.app.draw.formatting import plain
from binade.app.frame import sharing
from binade.data.run.access import read_only


def name() -> str:
    """The name of the user whose page runs: the proxy's, or the e-mail address of an account. "" without a user, as in
    a thread that draws for no page.

    An address that the provider has not verified could be anybody's, so the subject is the name of such an account.
    """
    if sharing.current.header:
        return str(st.user.get(sharing.USER) or "")
    if sharing.current.login and st.user.get("is_logged_in"):
        verified = str(st.user.get("email_verified", False)).lower() == "true"
        return str((verified and st.user.get("email")) or st.user.get("sub") or "")
    return ""


def reason() -> str:
    """Why this user has read-only access, or "" (see `data.run.access.restrict`)."""
    operators = sharing.current.operators
    if operators is None or (user := name()) in operators:
        return ""
    return f"{user} is not an operator" if user else "nobody is signed in"


def sign_in() -> bool:
    """Whether the user is signed in, or need not be. If not, show a page to sign in."""
    if not sharing.current.has_users or name():
        return True
    st.title("Binade", anchor=False)
    st.markdown("Sign in to see the runs.")
    st.button("Sign in", type="primary", icon=":material/login:", on_click=st.login)
    return False


def panel() -> None:
    """Show who is signed in, in the header, with a button to sign out if the app itself handles sign-in."""
    if not sharing.current.has_users:
        return
    with st.container(horizontal=True, vertical_alignment="center", width="content", key="user"):
        st.caption(plain(f"{name()} · {'viewer' if read_only() else 'operator'}"), width="content")
        if sharing.current.login:
            st.button("Sign out", type="tertiary", on_click=st.logout)
