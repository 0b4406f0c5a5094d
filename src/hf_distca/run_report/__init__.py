"""What a run left in its folder, as one page that needs nothing else. numpy only, but for the page, which takes plotly."""
